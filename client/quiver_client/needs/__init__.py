"""The needs of a consumer, told to the processes that share an embedded cache."""
