"""`hetu-fx demo`: a small model on four unequal emulated devices, beside DDP, on one screen."""
