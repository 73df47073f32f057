"""The report of a run as one HTML file: what is drawn, and how."""
