"""What the planner knows of a program: costs per part, memory, lengths, as values that are read and written."""
