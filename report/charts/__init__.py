"""Interactive charts: what a panel shows as plain JSON, its still picture, and pages made of panels.

`specs` holds the panels, `stills` their pictures for print and for a browser without script, `chart_page` puts blocks
of them into one HTML file. ``assets/charts.js`` draws the panels, ``assets/page.js`` holds what the reader chose.
"""
