"""Write what runs to a folder (`write`), and run it elsewhere (`load`)."""

FORMAT = "hetu_fx.export/3"
