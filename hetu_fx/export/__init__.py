"""Write what runs to a folder (`write`), and run it elsewhere (`load`)."""
