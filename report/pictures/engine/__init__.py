"""What stands between our pictures and matplotlib: layout from the widths of letters, light axes, SVG."""
