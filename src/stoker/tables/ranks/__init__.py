"""Tables on several ranks: processes of ``torch.distributed`` that train as one."""
