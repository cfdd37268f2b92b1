from spillway.runtime.device import CpuDevice
from spillway.spec.sizes import PAGE


def test_what_rests_on_the_cpu_as_device_lies_in_whole_pages_so_that_it_is_written_from_there() -> None:
    for size in (1, PAGE, 10 * PAGE + 64):
        buffer = CpuDevice().allocate(size)
        assert buffer.numel() == size and buffer.data_ptr() % PAGE == 0
