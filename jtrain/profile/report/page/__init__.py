"""Building blocks of the HTML report: markup helpers, charts, the style sheet page.css and the script page.js."""
