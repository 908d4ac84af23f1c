"""The configs as frozen data: Model, Cluster, Layout, Job. Imports no torch."""
