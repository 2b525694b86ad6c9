"""Reports: a plan explained to somebody who has not run it, as one HTML file."""
