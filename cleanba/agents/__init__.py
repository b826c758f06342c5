"""A trained agent: loaded, evaluated (beside training too), filmed, shared."""
