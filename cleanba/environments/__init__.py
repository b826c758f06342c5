"""Environments: how they are specified, made and stepped."""
