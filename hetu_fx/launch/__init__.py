"""`hetu-fx launch`: starts processes, sees them fail, and keeps the rest.

`launcher` runs a `job`: it starts its workers, hears them, and ends those that hang; `worker` is their side.
"""
