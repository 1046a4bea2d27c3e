"""Layer between the report's pictures and matplotlib: layout from the widths of letters, light axes, SVG."""
