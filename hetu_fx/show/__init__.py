"""How things are shown: tables as text, pages and charts as HTML and SVG, figures by matplotlib."""
