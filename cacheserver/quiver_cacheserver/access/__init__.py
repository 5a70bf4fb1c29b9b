"""Access control: who sends a request, and what it may do.

``caller``: the authenticated sender of a request. ``rights``: the right that each verb requires. ``control``: admits or
refuses a request. ``tokens`` verifies tokens by ``keys``, the operator's public keys; ``quotas``: the share of a
tenant; ``audit``: what was refused.
"""
