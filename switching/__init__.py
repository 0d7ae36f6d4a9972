"""The runtime: state, schedules, variants and switching."""
