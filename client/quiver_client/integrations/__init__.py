"""What other libraries' trainers need beside the loader. Nothing here is imported unless its trainer is used.

- ``transformers``: the callback by which the Trainer of Hugging Face keeps the loader's state in its checkpoints
"""
