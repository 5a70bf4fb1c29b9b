"""The loader: decides which samples a training loop reads next, and prefetches them.

``dataloader`` is torch's DataLoader over all of it. It prefetches batches by ``threads`` of this process or by torch's
``workers``, which make batches by ``source``; ``randomness`` seeds each sample. ``sampler`` decides the order, by
means of

- ``passes``: which epoch comes next and what of it is consumed; ``epoch``: one pass over one epoch's share;
  ``state``: the checkpoint, and how ranks merge theirs; ``merged_state``: the same, through ``group_store``
- ``consumer``: what is reported to the cache, and what is resident; ``several_needs``: the same over several caches;
  ``draw_wait``: how long a draw waits for that; ``known_order``: the uses to come of a fixed order
- ``loop_rate``: how fast the loop reads and could read, and when it pauses; ``turns`` measures it in the loop's thread,
  ``making`` where batches are made; ``probing``: what hits are worth, measured; ``profile``: what of it users see
- ``replicas``: ranks that get the same samples in the same order: one decides, the others follow
- ``rank``: which share this process reads; ``rank_agreement``: whether all ranks deal the same epoch;
  ``user_sampler``: an order of the user's, ``lazy_sampler``: one that is read while the loop runs
- ``order_sampler``: what torch, trainers and checkpoints see of an order; ``trainers``: what Accelerate, Lightning and
  others read and wrap; ``order``: what the loader needs of any order
- ``bad_samples``: what is done about samples that cannot be made; ``ledger``: what ``ledger=`` and ``replay=`` do
- ``mix``: the order of a mixture of datasets
- ``loop_pass``: the iterator of a training loop; ``put_aside``: the passes of other loops over the same loader;
  ``copies``: what a pickled or copied loader is
- ``progress``: a line of the first fill; ``wait_warning``: a warning where the loop waits for data
- ``arguments``: checks of arguments; ``labels``: a warning where batches are not mixed
"""
