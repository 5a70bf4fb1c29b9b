"""The loader: decides which samples a training loop reads next, and prefetches them.

``dataloader`` is torch's DataLoader over all of it. It prefetches batches by ``threads`` of this process or by torch's
``workers``, which make batches by ``source``; ``randomness`` seeds each sample. ``sampler`` decides the order, by
means of

- ``passes``: which epoch comes next and what of it is consumed; ``epoch``: one pass over one epoch's share;
  ``state``: the checkpoint, and how ranks merge theirs; ``merged_state``: the same, through ``group_store``
- ``consumer``: what is reported to the cache, and what is resident; ``several_needs``: the same over several caches;
  ``draw_wait``: how long a draw waits for that; ``loop_rate``: how fast the loop reads, and when it pauses;
  ``known_order``: the uses to come of a fixed order
- ``replicas``: ranks that get the same samples in the same order: one decides, the others follow
- ``rank``: which share this process reads; ``rank_agreement``: whether all ranks deal the same epoch;
  ``user_sampler``: an order of the user's, ``lazy_sampler``: one that is read while the loop runs; ``trainers``: what
  Accelerate, Lightning and others read and wrap
- ``bad_samples``: what is done about samples that cannot be made; ``amendments``: what a ledger says about them
- ``recording``: what ``ledger=`` and ``replay=`` do; ``ledger``: the writer and the reader of the file;
  ``ledger_format``: its frames; ``batch_encoding``: a batch as bytes
- ``mix_sampler``: the order of a mixture, by ``mix_schedule`` (how many of each part), ``guided`` (weights that follow
  losses), ``mix_part`` (a part's passes), ``mix_pass`` (one pass over the mixture), ``mix_state`` and
  ``mix_agreement``; ``order``: what the loader needs of any order
- ``loop_pass``: the iterator of a training loop; ``put_aside``: the passes of other loops over the same loader
- ``trainer_loops``: what trainers do in the loops around the loader's; ``injected`` and ``rebuilding``: orders that a
  trainer inserts; ``own_methods``: for wrappers that copy a loader's attributes
- ``progress``: a line of the first fill; ``wait_warning``: a warning where the loop waits for data
- ``arguments``: checks of arguments; ``labels``: a warning where batches are not mixed
"""
