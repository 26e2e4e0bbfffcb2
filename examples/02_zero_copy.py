"""Two-phase put and zero-copy reads: the bytes are written and read where they lie."""

import numpy as np

from moonpool import Pool
from moonpool.store.base import Reservation

with Pool.open(capacity=64 << 20) as pool:
    (space,) = pool.reserve([("page", 4096)])
    assert isinstance(space, Reservation)
    np.frombuffer(space.view, dtype=np.uint8)[:] = 7  # straight into the pool's memory
    print("visible before commit:", pool.is_exist("page"))
    print(pool.commit([space]), "visible after:", pool.is_exist("page"))

    with pool.open_read(["page", "no such page"]) as lease:
        page, missing = lease.views
        assert page is not None
        print(len(page), "bytes, first one", page[0], "- missing:", missing)
        pool.remove("page")  # under an open read the bytes stay
        print("still readable:", page[4095])
        page.release()
