"""Makes a GPU's context current in a thread: without one, what UCX does there for GPU memory fails or crashes.

Through the driver's C interface, so that no framework is imported.
"""

import ctypes
from collections.abc import Collection

from penstock.workers.kv_transfer.base import TransportUnavailable


def use_device(devices: Collection[int]) -> None:
    """Take the primary context of the one device that the pools lie on; nothing for none.

    Raises:
        TransportUnavailable: there is no driver or no such device, or the pools lie on several.
    """
    if not devices:
        return
    if len(devices) > 1:
        raise TransportUnavailable(f"pools on several GPUs ({sorted(devices)}) in one transport; open one for each")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailable(f"GPU pools without an NVIDIA driver: {error}") from error
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls = (
        ("cuInit", lambda: driver.cuInit(0)),
        ("cuDeviceGet", lambda: driver.cuDeviceGet(ctypes.byref(device), *devices)),
        ("cuDevicePrimaryCtxRetain", lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)),
        ("cuCtxSetCurrent", lambda: driver.cuCtxSetCurrent(context)),
    )
    for name, call in calls:
        if status := call():  # type: ignore[no-untyped-call]
            raise TransportUnavailable(f"{name} for GPU {sorted(devices)[0]} failed with status {status}")
