"""The embedded pool: objects in, objects out, one result per key."""

import numpy as np

from moonpool import Pool
from moonpool.errors import NotFound

with Pool.open(capacity=64 << 20) as pool:
    pool.put("greeting", b"hello")
    print(pool.get("greeting"))

    pages = [np.full(1 << 20, i, dtype=np.uint8) for i in range(4)]
    print(pool.batch_put([f"page-{i}" for i in range(4)], pages))

    buffer = np.empty(1 << 20, dtype=np.uint8)
    print(pool.get_into("page-3", buffer), "bytes, all of them", buffer[0])

    print(pool.batch_is_exist(["page-0", "page-9"]))
    try:
        pool.get("page-9")
    except NotFound as e:
        print("error:", e)
