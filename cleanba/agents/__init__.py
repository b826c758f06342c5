"""A trained agent: loaded, evaluated (also during training), filmed, shared, exported."""
