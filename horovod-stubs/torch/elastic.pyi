from horoclone.torch.elastic import *
