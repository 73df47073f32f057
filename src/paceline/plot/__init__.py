"""How numbers become pictures: one `Line`, one tick rule, one palette; as an SVG file, within an HTML page, or as text."""
