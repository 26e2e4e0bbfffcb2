"""What `/metrics` says of pool and converter."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from moonpool.c2c.converter import Converter
from moonpool.metrics import ConverterMetrics, PoolMetrics
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.leaks import eventually
from tests.c2c.pairs import PAGE, config, identity_of, keys_of, model, random_kv, rule


def test_pool_and_converter_figures() -> None:
    source, target = model("source"), model("target")
    pages = random_kv(source.spec.page_shape(PAGE), 3)
    registry = CollectorRegistry()
    with EmbeddedPool(1 << 20) as pool:
        converter = Converter(pool, config(rule(source, target)), load=lambda r, _: identity_of(r)).start()
        registry.register(PoolMetrics(pool))
        registry.register(ConverterMetrics(converter))
        pool.batch_put([k.text for k in keys_of(source, 3 * PAGE)], pages)
        assert eventually(lambda: converter.stats().converted_pages == 2)
        text = generate_latest(registry).decode()
        converter.close()
    assert "moonpool_pool_objects 5.0" in text
    assert "moonpool_pool_puts_total 5.0" in text
    assert "moonpool_c2c_pages_total 2.0" in text
    assert "moonpool_c2c_tokens_total 8.0" in text
    assert 'moonpool_c2c_rejected_pages_total{reason="first_page"} 1.0' in text
    assert 'moonpool_c2c_rule{rule="source→target",state="ready"} 1.0' in text
