"""Zero framework changes: pages that an engine puts through the drop-in are converted, and read through it."""

from __future__ import annotations

from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from tests.c2c.pairs import BUNDLE, PAGE, config, keys_of, model, random_kv, rule
from tests.c2c.test_converter import running, settled
from tests.integrations.support import Block

SOURCE, TARGET = model("source"), model("target")
PAGES = random_kv(SOURCE.spec.page_shape(PAGE), 4)


def test_source_pages_put_by_pointer_are_converted_and_read_by_pointer() -> None:
    keys = [k.text for k in keys_of(SOURCE, 4 * PAGE)]
    wanted = [k.converted(BUNDLE).text for k in keys_of(TARGET, 4 * PAGE)]
    blocks = [Block(bytes(page)) for page in PAGES]
    with running(config(rule(SOURCE, TARGET))) as (pool, converter):
        store = MooncakeDistributedStore.over(pool)
        assert store.batch_is_exist(wanted) == [0] * 4
        pointers, sizes = [b.ptr for b in blocks], [b.size for b in blocks]
        assert store.batch_put_from(keys, pointers, sizes) == [0] * 4
        assert settled(converter, 4)
        assert store.batch_is_exist(wanted) == [0, 1, 1, 1]  # the first page stays the target's own
        targets = [Block(b.size) for b in blocks]
        read = store.batch_get_into(wanted, [t.ptr for t in targets], sizes)
        assert read == [-704, *sizes[1:]]
        assert [t.text for t in targets[1:]] == [b.text for b in blocks[1:]]  # this bundle's projector is the identity
        store.close()
        assert pool.is_exist(keys[0])
