"""HAP's programs: priced, and measured on throttled processes."""
