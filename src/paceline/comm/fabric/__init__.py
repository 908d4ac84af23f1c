"""What joins ranks, read from what the system says: pure parsers of text and of folders.

| module | reads |
|---|---|
| nvidia_smi | `nvidia-smi topo -m`: NVLink, NVSwitch, PCIe, the card next to each device |
| sysfs | /sys: NUMA nodes, interfaces, InfiniBand and RoCE ports with their PCI addresses |
| interfaces | which interface reaches the other hosts, for gloo and NCCL |
| order | in which order ranks stand, so that neighbours are near each other |

Nothing here starts a program or opens a connection: `comm.topology` does.
"""
