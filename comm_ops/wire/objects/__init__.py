"""Objects that ranks tell each other: values without code in them, so that reading runs nothing of the sender's."""
