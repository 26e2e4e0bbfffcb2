"""One model's pages become another model's pages, inside the pool, by a rule."""

from pathlib import Path

from moonpool import Pool
from moonpool.c2c.config import C2CFile, ModelEntry, RuleEntry, resolve
from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest

ROOT = Path(__file__).resolve().parents[1]
c2c = resolve(
    C2CFile(
        models={name: ModelEntry(f"models/{name}") for name in ("moon-large", "moon-small")},
        rules=[
            RuleEntry(source="moon-large", target="moon-small", bundle="bundles/moon-large-to-moon-small"),
        ],
    ),
    [ROOT],
)
large, small = c2c.models["moon-large"], c2c.models["moon-small"]

with Pool.open(capacity=64 << 20, c2c=c2c) as pool:
    print(*pool.converter.wait_ready(60), sep="\n")
    source = Instance(large.ref, large.spec, pool)
    target = Instance(small.ref, small.spec, pool, origins=lambda asked: c2c.origins(small.owner, asked))
    text = "".join(f"{name}: {value}\n" for name, value in [("Ada", "green"), ("Leo", "lamp"), ("Zoe", "river")] * 16)
    prompt = source.encode(text + "Leo:")

    source.generate(GenerateRequest(prompt=prompt, max_tokens=0))  # prefills; its pages go to the pool
    source.flush()
    result = target.generate(GenerateRequest(prompt=prompt, max_tokens=1, wait_converted_s=10))
    print(result.usage)
    print("Leo:", result.text.strip())
    target.close()
    source.close()
