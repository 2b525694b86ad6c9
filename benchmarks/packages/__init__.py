"""Models of packages that nobody here wrote, trained under a plan as their users train them."""
