"""The configs as frozen data: Model, Cluster, Layout, Job and their specs. Imports no torch."""
