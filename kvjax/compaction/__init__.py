"""Compaction of caches: few fitted keys and values stand for all tokens so far (Attention Matching, FoldBias).

    found = references.of_following(model, params, cache, context)      # the queries that attention is matched on
    smaller = compact(model, params, cache, slots=100, references=found, fold=True)
"""

from kvjax.compaction import references
from kvjax.compaction.compacting import compact, init_compacted
from kvjax.compaction.in_order import compact_in_order
from kvjax.compaction.references import References
from kvjax.compaction.slots import slots_by_head

__all__ = ["References", "compact", "compact_in_order", "init_compacted", "references", "slots_by_head"]
