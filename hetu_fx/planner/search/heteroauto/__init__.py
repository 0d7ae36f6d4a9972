"""HeteroAuto: pipelines over unlike kinds of chips; `search` is where to start."""
