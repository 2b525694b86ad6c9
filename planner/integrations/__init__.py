"""Callbacks for frameworks that people train with, each a package of its own that is imported only when used."""
