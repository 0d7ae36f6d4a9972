"""How things are shown: tables as text, timelines as lanes and as Chrome traces, pages and charts as HTML and SVG."""
