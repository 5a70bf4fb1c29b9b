"""What a consumer still needs, told to those who share the cache with it; what they hold, heard back.

``base`` is the one interface, ``rack`` tells the daemons of a rack, ``folder`` the processes that share an embedded
cache (``leases`` is how they hear, ``board`` what follows), and ``watch`` does the telling in the background.
"""
