"""Interactive charts: content of panels as plain JSON, their still pictures, and pages made of panels.

`specs` holds the panels, `stills` their pictures for print and for a browser without script, `chart_page` puts blocks
of them into one HTML file. ``assets/charts.js`` draws the panels, ``assets/page.js`` keeps the reader's choices.
"""
