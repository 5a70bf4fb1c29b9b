"""Leaving the rack without its having to read the origin again (ADR 0041).

``drain`` is the state of a daemon's drain, which an operator, SIGTERM or an eviction notice begins; ``giver`` names to
the next owners what only this daemon holds, and they fetch it; ``stock`` lists what it holds, and ``queues`` has what
is still to be named to whom; ``receiver`` decides what to take from others and fetches it; ``worth`` says what files
are worth on both sides; ``notice`` watches for a notice that the machine is about to be taken.
"""
