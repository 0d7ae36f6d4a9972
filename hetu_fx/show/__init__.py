"""How things are shown: tables as text, and pages and charts as HTML and SVG."""
