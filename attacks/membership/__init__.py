"""Which records a site trained on, from what some parties saw of its updates; and what that says about epsilon."""
