"""Equal devices: what torch does on them, beside what we do."""
