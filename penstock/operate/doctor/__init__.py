"""``penstock doctor``: one check for each cause of trouble, with its fix."""
