"""Pure functions on arrays: returns, losses, distributions, moments, optimiser steps and replay memory."""
