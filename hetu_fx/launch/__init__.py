"""`hetu-fx launch`: starts processes, sees them fail, and keeps the rest.

`launcher` starts `worker_process`es, hears them over `channel`, and asks `judge` what to do; `worker` is their side.
"""
