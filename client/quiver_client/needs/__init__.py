"""What a consumer still needs, told to those who share the cache with it; what they hold, heard back.

``base`` is the one interface, ``rack`` tells the daemons of a rack, ``watch`` does the telling in the background. The
processes that share an embedded cache are told by ``quiver_client.embedded.fetching``.
"""
