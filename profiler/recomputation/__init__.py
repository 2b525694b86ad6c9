"""Running again: a module call, recorded ops, a function; and what must not run twice."""
