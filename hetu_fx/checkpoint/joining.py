"""A process that is ready joins a run under way at a step's end: all run the script again then, together with it."""

from __future__ import annotations

import threading

# Set once the launcher has a process that waits to join; it is cleared when the script is run again.
asked = threading.Event()


class Joining(SystemExit):
    """Ends the script at a step whose snapshot is whole, so that it goes on from there with more processes."""
