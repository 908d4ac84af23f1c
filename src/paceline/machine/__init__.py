"""What this machine is, read from what the system says.

| module | what |
|---|---|
| nvidia_smi | `nvidia-smi topo -m`: NVLink, NVSwitch, PCIe, the card next to each device |
| sysfs | /sys: NUMA nodes, interfaces, InfiniBand and RoCE ports with their PCI addresses |
| interfaces | which interface reaches the other hosts, for gloo and NCCL |
| host_order | in which order ranks stand, so that neighbours are near each other |
| discovery | devices, cores, memory and links of this host, as a Cluster and a Host |
| cpu_speed | what CPU ranks multiply and move, measured once and kept |
| core_clock | how long this process had no core |

The first four are pure parsers: `discovery` starts programs and asks the kernel for them.
"""
