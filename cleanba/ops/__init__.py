"""Pure functions on arrays; nothing here knows of environments, networks or devices."""
