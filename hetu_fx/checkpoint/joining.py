"""Processes join a run under way, or leave it, at a step's end: all others run the script again then."""

from __future__ import annotations

import threading

# Set once the launcher has processes that wait to join or are to leave; cleared when the script is run again.
asked = threading.Event()


class Joining(SystemExit):
    """Ends the script at a step whose snapshot is whole, so that it goes on from there with other processes."""
