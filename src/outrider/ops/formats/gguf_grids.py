"""The code books of GGUF's IQ1, IQ2 and IQ3 formats: the points of a lattice that a block may refer to.

A point is 8 (IQ3: 4) indexes into the few magnitudes of its format, 2 (IQ3: 3) bits each, the first in the lowest bits;
points follow each other without gaps and are written in base 85. The points are part of the format: they are those of
ggml (MIT licence, Georgi Gerganov and the ggml authors).
"""

from __future__ import annotations

from base64 import b85decode
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Grid:
    width: int  # weights of a point
    bits: int  # of an index
    text: str


@lru_cache
def points(name: str) -> np.ndarray:
    """uint8 [points, width]: indexes of magnitudes."""
    grid = GRIDS[name]
    bits = np.unpackbits(np.frombuffer(b85decode(grid.text), np.uint8), bitorder="little")
    indexes = bits.reshape(-1, grid.bits) << np.arange(grid.bits, dtype=np.uint8)
    return indexes.sum(1, dtype=np.uint8).reshape(-1, grid.width)


GRIDS = {
    "IQ2_XXS": Grid(
        8,
        2,
        "000621po*D3IGuR6aXLqA^<1=DgZ$ML;z3#SO8%FWB`Bwf&hvDq5uH_1OX5M6#+m2gaMcV00II6A_9T}0R#jD5CkCvBm_VNLIg+zU<82#gan"
        "WTqyzv30tE;KAO%JRX$61<kp&3`5C%X7ga)Jr00;#L2nZAiC<s9aL<mp_QV56$1PMS10tyrg0T2Wb5D*~{KoDRMgb<Jrl@I_C2oWF=P!U=Yf"
        "Dt4TMG^oM2oxX`B@{^%fD{-NVif=u78U^*1Q-w)Kp24-02u`tpczpb03ZS&3Lr!vVIY7Yf*>g&NFe|s0wMt<1SAk7KqOWq03|^sWF?R$2q+*"
        "Zlqf_h0YC&m5I`6}AwVQRKtM=9RzP4tfk1>nkU#)IAVFb4fI)>p0YVT$NJ3UZXhHx)2t*)6fJB)@5=A6M07d~w1V|7_KuASM07+O$VM&5XMM"
        "{uL08j`}5l|UWAW(o%h)@JkLQ$kqky4OUl2i&+0ajF209X-N8CYakKv@V{1Yi(gKwxNK0AW>O7-C>z0AvMZ5M>f&gk?f#0DuC33V=a?f`9~p"
        "7=b{65rP4P1cVTT6@);9V1xjLMun7x35Gz1V1@#S1c?!f1dtGrB#=Omp^z4lfRRO#0F)w>M3hmLftVnf0-#W!g`f$c0HPSAP^bi{",
    ),
    "IQ2_XS": Grid(
        8,
        2,
        "000621po*D3IGuR6aW?g82}&vA^;@-C;&kKL;ywrNdQm)QUFx|SO8%FWB`Bwf&hg8hyalQlmM9kpa1~@1OWyC2>}oR5&;zf7y%jqAps--Kmk"
        "GlMFB_wQ2|r|U;$_WfdPa8kO2S!0s;jB2m%oT6apXuK>|bqPy$r~fC7pF0R#jD1_TKN5Cjqg6$BUrAp|4@Km<YrMFdC$Q3O;3Rs>)KfdqsEk"
        "OTk)0tE#H2n7)Z6a^p!K?OtwPz7NHfCT{t1O^ZWCI&zTLI#8e00;sI1qcWT3J4Jh6bK*)B?v(XL<mp_SO|a!pa`l60SN>N5D7pDfeDET016-"
        "qC<>Mepb7yH1P}%g2@ntv5)c&-7!V;4BoIIlLJ&m|NDxsFR1jbgY7l`Cgb<Jr01*Na1rZ1l5fKy-AQ3?kL=jLCfDx1tmJtCG1QG@k5E4KVU="
        "jcn0u%)l2ow<%6civ7K@>z3Nfb~NWE6lD0Tl!l5EVcb02UM$NfrSZ1Q-w)5*R=jR2YUB02u`tW*Jc$sTu$v0w4t-2p|d|5g-&GARs{?L?BQg"
        "fFPhC0U-n-5FtPzNFik*03sqHfFh_O0VD(@5F{xiKqLSqK_yZpnI!=x8YZSD04NA33Me2bRVaukq9|x7kSPc%AS!|?h$@OI0YC&m20#fw5I_"
        "<@6+jq3AwVQRKtMu3ML<YEN<dLSR6t-rWk7*Igg}r$06_vl1wjZw5kV9|AVEPvL_ttNfI)>pqCo*d1VRu(5<)3LKtcdS0z?Hw2t*M?6hs+BA"
        "Vfh#L_|<TfJBr;0YwBw5Je<KKt-BG07eQ%L`G0X0Z0T$5J*5sMMzXgVn_f<5lKWzP)TV?1WEu<0#F4|2v8AF6i^^gC{RIAL{LyrfKUNZ1W^!"
        "C6;VJ@LQw!xL{h3!0aOH35L6*lKvZB<fmESX096Q8fK`Z9Ay#Nsp;iD`6j(u6P*|B*8d*SDLRp1c0bm4R5MV%HRA6FYhG3~+0AVCzN@9{?0A"
        "v<q5M@ARMP;OA0cdJyC20m~RBB>s0DuC31%L>E5r7ncAb=`>L4ZVnP=J7df`F)is(=B31c3&D5P?8}QGr>30D>TbfP#X8pn|A^0fYpE5QGwh"
        "6@);9V1$W;0EI+_rG*%VYK8!a2#6(!T8My%f{3Vy28kkyfQpEUmWrr~0gwcc5RgESR*-~{0Ffe*WRX^qiIM=61(ZaTP?T7dDV30wl9fT0QJA"
        "KfNtqRzV447+0-y+>3ZNjMDxjdCQK4C(rlA0$0-^|_Dx!d*prSyem84~+n5GJ-AgCg!D5#*QsHg;~gsFz9D5@%|k*cby",
    ),
    "IQ2_S": Grid(
        8,
        2,
        "000621po*D3IGuR6aW?g82}&vA^;@-C;&kKL;ywrNdQm)QUFx|SO8%FWB_IWX#ju#f&hg8hyalQlmMUrr2wh`0RaR71_22H5CIYa6#*ClAps"
        "--KmkGlMFB_wQ2|r|RsmT7U;$+TXaRu%gaMENk^z+gp#h`;00II61p){H5dstfAOb1^K>|bqMgmC!Py$r~fC7aAiUO1Zq5=T~1Ox^I2?P)X5"
        "(E_l7z7~%Bm^b|DFi?SLIgzwNCZj*Q3O;3Rs>lDU<6_WWdwl)gan2Ji3E@Yl?0dsp#-D^00jaC1qBEN3I!1b6a^Lq83iB(B?Tx2K?OtwMg>U"
        ")Pz6#2RRvfDVFhFbfCYjDg$0NOkp+|mpalU21O^5M2?h`b6$U^CMFvO)Q3g~7U<QE(ga(iX00;sI1qcWT5eO6r76=&#AP6N0DhNRcL<mL*Ne"
        "EB~QV3NDSO{SVWC(x=g$R@gst5rI1PKrc5(yOv7zrT>KnX<&NC{C1R0&`SfeDZa016Qb6bd2=C<-bHPzsp}0T2Wb1`r7l5D*d&6%ZH@ArK@G"
        "CJ;anLJ&m|NDxsFR1j7WSrA|lVi08zXb^!Agb;=hkPwv+m=K{5q!0iR0ucof2oVYq5fKy-77-Z{AQ2)FB@rkQK@mg|MiEI7P!UoQRS{SbVG("
        "2zfDwWbg%OAmkr9*;0TKif2@((z6%rv5BoaUpMG{dGR1$#_gc6Vv02Bfg1r!Jr5fl^@78Ds2AQUAOC=@{yL=;98Nfb~NQWRAbSQKFtWE6lDf"
        ")s@mh!l|&loX&80Tl!l1{Dbv5ET*?6%`m2Ar&MQKovq2MHNUDQ594bU=@KCgcXn#02T!n2o@0*6c!*BK^8<7P!@m|sulql1Q-Sw2^bI<6&M&"
        "8As9dyLKsCDNElHVR2X0wff$4s02u-q1sMn#5g8O2AQ?d!L>W*SX&Is!1R4+;KpIvW03ZS&1t16@5g-&G79bfQARr|mDj-21L?BQgQXo|zWF"
        "UYbiXfCAsvrR&1R)S15+M~KAt68^LLo&VQ6W?zU?G7agdvb203r$^A|favDk4N8P$GyTiXx~Y0VD(@1|$h25F`~O7$hMiBqTs2LL@~bNF-4t"
        "R3u;|fh2?^kR$*l1tkb25hWBQASFR1L?uuqW+i|n0VV_{5GFt-StbA|1t<|H6evL`L?}=wiYTfm0VxD25Gj=@3MwKhWGaX%iYfs>1V9Er2|y"
        "4)5<nF|7(g08AwVQRCO|+yLO?}8NI*(JQ9x8cRzO)mU_fF(Wk7*Igg}r$l|Yz4p+KZS06_vl1wjZw5kV9|7C{+7AVDHQB|$+!L_tPDNkLFSQ"
        "bAQgSV3VyWI=#If<c8rh(VD-ltG|D0YU^q5JD0{6+#$7Btk$!MM6kIQ9@KgU_yaHghBvB0z?Hw2t*1*5kwS37DO3DAVeZWB}6DhK}1AEMnp+"
        "OP()HhRYX`sVMJs^fJA~sg+z!%kwlb4phN*h1Vsi#2}KY^5=9k77)2pPBt<|)LPbSINJUXaR7GG#YDIxXghh}=07e2v1x5%)5k?e7AVxt(L`"
        "G0XfJUW80Z0T$2}lq~5=a$D7)T*VBuGF=LP$kONJvpgR7hY*gh-G`07(K#1xW}=5lIwDAW1<<L`hIdfJv4~0ZIf)5K2Hw08j!@1yBf35l|FR"
        "7El>bAW$MuB~U0(K~O|cMo>vmP*74(RZv(^VNhgHfKY-^g;0o4kx-OS0Z{}|22lx75K$6Q6;T*bAyFhzKv6<bMNvpmQBhP;U{Qflgi(-D08#"
        "}~2vQMJ6jC5kK~h9gP*Q19fKmZe1XKo82~-eN5>ypb7*rutBve3DLR3XmNK{c&R8(M8fmDQ4kW>Iw0#yZ72vreP6jdNqK~+RmP*s3c0agT75"
        "LPBuKvn=)0$2rD2v`wV6j&fwL0CjsP*_@6fLH-p1X&PSKv@7<8Cr!}s9FJF1YibW5MUBu6<`=(Az&n6Kww2+NMKQ5RA69WgkX?h0AT`Q1z`w"
        "b5n&WzAYnmaL}5^2fMJ<o1Y!_kKw?&6p<)1J1!M?h5o8o(AY?&gL}XB8fMfw>1Z5CqKxIm0Xl0UR0A`eC0cZqh5NKs+m}mfLDrrJ$p=tnt0)"
        "Pd82!IiQ6o46kAb=%+L4ZVnP=Hc^Re)H4VSs>ug@BQOlz;(&1c3>G5P=eb6@eImA%P@;K!HMmMS)0xQGrx}fq{g9kb$Xz0D=XA3W5=W6oNs5"
        "M1oL)0fYpE280QO5QGwh6@(asA%sALLWD(xNQ6;@RD@uJfrNyFkc0q*0)+*I2!#=a6onv#L4`zxP=$bniiH7&1cnfXDTY9X0Eh*M5r`CsL5M"
        "_%P>7<40f_{OK#66EB8pgwT8e^-qKW~K1ds`k5Rej(6_6N^B#=OmLXbs}NRUyGRFGhhfslldkdOe81(6Yv6p=xZM3GRDT9E;g1d<SvK$51C0"
        "F(lh1(XPs5tI~^Ae2FrM3hjJfRvV$0hI)m5S2icn3bWG0G39UWR?M#1eg$*CYV5&sh9wnNtsfakeUFX1)vI`6rduYDxg82M4(WhqM)jvK%r%"
        "!0-_3{BBCgwDx!j-h@y(3sG<R+1f&q8K%|MJq@)0)8KqIC3aBWkqNr4<hN%du3aTKgBC05=h^nfp",
    ),
    "IQ3_XXS": Grid(
        4,
        3,
        "03ZMakN^wt01zMn86W~X&;vm*1W2F+QBVa~pao&T26zAnf<Op~011+i37hZ<sqhND5DdqF49ZXq_^=QkK@u;q6Fm_WN1+vJ(HXRX9L(Vy;}I"
        "VLG9U<|AQ3Vl7@{E@av~@KBtnuTP$DIPGAM|mD3O9Gx&kc10xj8MF7^^I1%onBLp5fTH-#fT-~&Jclt2pvK@wy^86-kMG(<&&L`oDzSTsj>g"
        "hzlRNQv}FkR(Z;1WK(GOvuDc_{2{gwNgWMRbj<f!8KgYRbByxU<wvt6NX|nrei=RWKfo6WM*c8HfV@eX{x4c$+m46cXB!hbVet2ZO3??H+$O"
        "$e+2k|9r%GO_=0>0iJu6HuxN|NSdIjlk~CSBV~Ll=iJZ!boeCPFI0~djYNc(;sG6#)!n&>qJFyq5vqGD-s7t-#OTi>;!ZaMkas0@%jLqIm(n"
        "YP-n?2moJ>Ug?;0UhaDsJUquIQz%>cHOY+Yav$AM!vi^i+@e",
    ),
    "IQ3_S": Grid(
        4,
        3,
        "01yBIPyh#j012P~4B!9|5CIji0U#g(C2#^MumUh313AD0KL7+lAOu8!1WC{YP%s5okOf^p260dadH@K4PzZ;B2#eqdkx&VkzzL#I3a5|?tAG"
        "o;Fbv7i4A3AA*{}`XKo01j4)>4`{QwXP@emO~5gGv!Basp~ArwRb6;fdpTM-szaTa#57lx4-i;)?sksH7v9K-<~(qSFjfgbDuAORvE1cD$5v"
        "LFreAP^!U8NwkR!XhpbBRT>kK{6ypf+S25C0Md0VS*-Vf+v0gD2mc3j{+%_qA8#<Dy;%5x)LnJaxBQQEYWf;*upL0A}{zdFa@J943jY%BQhp"
        "~GAt7`NV7CigEd-{HjqO(mqR+H6FkF%JjxS2-4j0YgFgTiKm$}j2ZTTh#6S)dK@)UA7^FcVG(shWLMn7aIJ84O1VloFL`(EUQdC7*#6@D1Mu"
        "9{~hZISZgh`(iN~`orxx`DrBuvGWOwvS6*|bgKgiiJpPzME36Qxld6;e9YQ$&?iQuS3}wN`iqSb}v}k=0tURb0tsUD!2V=p|qYwqOnRU=o&L"
        "8`fbWMq($HVl$RwK{jMX#$-`8Wnczpdgf<<rf86+X`F^?!G>(i7H!jZZP*rW<92TCwr>NMa1JMN8K-hEM{_}kbV^rsT1R$nw|9;gdcik*&?k"
        "M}2Y>{qfDlN57pQ?Dh=MpMgh!Z!ODKg{*o9-5hHV&#gNTTY7>Sz*imxb(xJZo2xQx&!joH|Z04b0Z`H>)*lSO%yQ7M;;$(gW;oXv@y<C&fUi"
        "l7WCp&&}4C#s@0%A-L#q(!QvQL3eS3aE)XshH}it17I=imca4uIXB@`x>wW3$Yq&vPx^UX}h+fE4;)jy$QU)4V=Ln48uSS#aB$nip<HP+{&_"
        "y%fQUc(G1QNJ<>7_)I-hHa9!A-o!rX}-~@i)5H8^!4&p2><3gU~R6gcq9_WOQ=#C!gn4apwuI=5v?g3x$3lH%qFZE(C_?Zv<",
    ),
    "IQ1": Grid(
        8,
        2,
        "000621po*D3IGuR6#yUrA^<1=DgZ?QQ2<l`RsdxHfB=F3hyaQJl>ndsq5!A>ssIE51pyHO6af|i837srB>_PJMgd6yQUO%~S^;4JWC3OYXaR"
        ")*kpYwemI0*!00II62m%TM6#^gvA_6D^Dgs3UQ36>4WCCddfC7R7hyscNkph(hnF62!q5`M_ssa%N6a*FoB?LhPNd#2{S_EVSWdxA~nFOT-0"
        "R;pF1qB8L6$Kat8U-l@Km|nwN(E2_Q3X^5RRvZBSp{GPVg+RdXa#Bofd!ETl?9jungyW+qy?n~rUj`56b2avK?XzyPzF*4RR&lFU<P3ZW(H{"
        "ng$9uZlm?jw00;sI2nY%Y6$l^*A_yo5DhNdgQ3zHDWe9)>f(VERiU^empa`M}s0gYE1ql%e6bTs#Bnc%6K?zU^Q3+KEVF_djX$g@DlnIsznF"
        "*x{015&M2nq@c6$&5<A_^!9DhfpkQ3_cKVG3mmfC_>Ng$jrYiVBqqpbDZ2s0ykI5D*a%6c8B@BoHMKK@da`P!LrRSP)?lWDsQ#X%LYRln|B>"
        "p%A4I0TBcd1`!Dn5D^j)6%iN_ArT}IDG@~xN)b>IQ4vxRR1sAXRuNedU=d{zgb|Vvl@Xy4q!AGk6cQE^B@#dqMiNO9QW8}XSQ1(iWD;f)g%X"
        "hxloFN_r4j)Y1{4Vt6ciN{7!(;4ArvMQK@>$4MifXCN)%BPR1{SdRuowjViaW*XcUALi4>3&loXW|m=u{5niQcFq!gtTsT2Yg1r-Vv5fu~_6"
        "%`g085JNEA{8YSC>1IdK@~(5MHNOBQ58}ZR25YfRux$lS`}dxWEEu<W)*1_fE9ujgcXGqh!u(zkQI>?logc~mKB*5niZfGq7|hT0Tu)n1r`P"
        "t6&4m27#129Ar>YUKo&w4L>5IBNES*KQ5IDeRu)(mSr%ayWEN!>XclP}Y8HkTiWZU<l@_EHsTL6!78oTMK^R0BMi@yLP#9GhSQuIuU>IQ-WE"
        "f@`X&8kVkr<R1r5F$y5*Za48W|xOB^g2)L>WaHNEuNXR2fwnRvB3tS{Yy&Wf^K2i5Za@k{Oj5m>HoNrWvUj2^tm}BpN0fL>fjKNg7ZZQW{kn"
        "SQ=p(W*TW4g&L6>mKvHG03ZS&2p|d|6(ArWA|NFoC?F~zMIcciSs-B`Wgvhcf*^<>iXfFBpdg|kr68yvsvrd+5g`;I86hPhLLo#UNg-7sSRq"
        ";=VIgE8Wg%uEg&~k3mLZuTr6B<#2qFq15h4{LAR;0nC?YB%MIuomRw7v<Wg>whh$4z2ks_5Mpdz9os3NK&1tb(C79<%YB_u>7MI=TfNhDGvR"
        "U}v>S|ny9g(Q(Alq8uXp(Ldw2_+RJAtfm#KqW;bNF`AvR3%j<StVj6WhH1Oi6xLFlqHoVm?fGep(UgxrX{H*1tt(C5+)fYB_=^8NhVb$U?yQ"
        "EX(ogwh9;0EnkE1!0w@S53MdsQASfazC@3l@MJQ1yR48RAfGC0}h$xCEpeUj!s3@u^2`LdN6e$@gB`HQJNhwk(RViU9WGQATX(@#%kSUfanJ"
        "J_xr6~X^0xAe93MwEfA}S~<Dk?=PQ7Tp{St?~JfGUD2h$@OIl`5brqAI8=swxFQ5kM9|B|u3)Qb1KeSU_4pVL)U+W<ZocnLwdHra%Be0YL;o"
        "20;ly5<wL~7C{(68bKjJCP67dML|eGN<mRUR6$iiRzX=oT0vz&XhCX0fkA{phCz@)l0lV0ph2NQqCo{h5keF~7D6RLK|)eORYF=qWI|~|i9("
        "b@r9uHj6+{_CDMUp?NJL6RQAAWkRYX=qVMJm?WkhI1YD9rVhD3=(kVKM1l|-OKp+u=f0Yw5u1w{%)5k(Y56-5?B8ATvPB}FPlK}AGGMMXwMN"
        "kvdaQAJcmRYg`sSVdVyVMSy`WkqI1X+?rXghho#h((b_ltq<AmPMIGnnk5Ws70zp0Y(Kz2}Tq~6-F3F8b%>TBt|JlKt@7FMMg+QP)1QkQbtu"
        "qRz_JyVn$^~XhwlXg+_`-ltz_Cp+=-erbY!w5l9tC8b~EbLP$wSP)JosSV&<=WJqR6X-I`gkw}zCmPnaMrAPru1xW@;3P})26iF3H7)c>XBu"
        "OSoKuJYON=Z>kQb|-vRY_J!SxI0?Vo7C5W=U#EhDnJ@l1Y_GmPwdNp-H4krb($u7D_})MoLLaRZ3V&T1sR}X-bqzrAh%%1W*M~22cr55>ORT"
        "8c-onBv2_(Ku|?cNKjEwR8Un=R!~_`Wl(5PhER!6l~9;apirSurckL+1yKl52~i4B5m6LT6;T#Z7*QEfAW<bzCQ&F+Dp5gEL{UXiMo~#oP*G"
        "7)Qc+Y<RZ&(^SW#I~T2Wz9WKm^NW>INTf>DK0kx`UUl~I;anNgrorBSL;0a6B15>gdX8d4!rBvL|BMN&#qQBqV=RZ><`SyEzBWm1JwkW!LTl"
        "~S2fno^`v1XKl75mXdZ6;u{f7*rWlAyg$)C{!v`K~zLkMN~#qNmNQyP*hP=R8&<|R#aG2SyWn7VN_yNWK?BTW>jfZfK-T7id2zQlvI^emQ<N"
        "kp;V+)rBtd^0aXH31XTr922}}F5LFRX5>*sc6;&2h8C4opAyp(*B~>O>DOEsKK~+LkL{&vqMpZ~vNmWo)QB_h^R8>_~R#jM4Syft9U{zsNWL"
        "0HVW>siaX;o@ffmMW6g;j}FidB$RkyVscl~tBim{plop;e?+rB$X?sZ{`00agN51Xc!C2v!MJ5mppd6;>El8CD=xAyy(*BvvI>CRQj`DON#N"
        "MOH>uNLEQ!N>)%-QC3n`R9011R#sS6SyozBVOC^TWmaicf>woAhE|AHiB^hMkye#fnpUD#rB<d^s8*>~1Xu-F23QGL5Lgvh7+4`#Dp*BWNLW"
        "f(QCL)1RajP7SXfzDU|3>UWLRZbf>?=IkXVvfl~|Zqp;)O{0a*fB1z8GN5m^*j6<HQp8CfM+L0LpuMOj8!Nm)=?QCU)1R9RJ7R#{kCSy@_HV"
        "OeBZWm#rfX<30;g;|MNky(^km06Zqm|2-wrC9`82wD|d8d@M)C0Zt0DOyEZNLoo+QCd}6R$5qESz2ORWm;%jYFdF>idvFdm0Ffsm|B`zp;`r"
        "C6krx$8DJ$~L|{;0RbW<NSYTRUVPIrnW?*Sxfnb(krC<SJ1YrhY31Jdp6=5M^B4H+BDPcunNnuf8Rbf_PSz%>iW?^b!gkg$dl3|r$p<$+Bsb"
        "LXf7GfD<Kw?2+Mq*WBR$^FUU}A-0kz$r&rD73e5@Z!*7GxS^A!H_GDP%xoLS#i`NMuT6QDjtPRb*CVS!7ydU}R!sWn_e8g=C3jkYti%lw_4;"
        "mSmV@nq;A5q-3dN1!V|j3S|*x6=fD>8D&IeMP){1No7!FQDszRRb^IXS!H2mWMyS#W@Tw*hGmImie-^ym1UM?nPr+~qGhFJre&yQ0%i$j6=o"
        "o2CT1vRDP}-sMP^85N@h`JRAyCXR%TdcT4rEoWoBq*fM$Ybg=UIolxCJ@m}Z$~pk}0Ire>;U7HAo0C1^otQfO6ZT4-TtX=sILk!YA`rf30a1"
        "Zfay6=@-9BxxpTDQQ4yL1{&4MrlZCQE60ZRcTgfS!rNtWoc?@f@y?lifNT;p=qRPrD>^Y5o#7{7-~UkL~2QDP-<0bSZZ2oWNKw<X=;XQlxmo"
        "2nrfzM0DuC32!INJAb=u(D1a(}MSxI%QGir{R)AT6Wq^Qyf`EvCihz}Xpn#%)sDP?~1%VNP6oD3j8G$8%L4ibpNr6y-Qh`;0R)JW7S%GAMW`"
        "Sveg@K8Il!2CknSrH&0D=O72!aZN6@nmwB7!J_DuPjhRDxN8WrBc$f`W*Gih`Abpn{@;sDi436oeUsL4-tvQG`{5T7+SQWQ1vil!Tdt0fh;L"
        "5``6o8igi>DTP3VL4`$yNQF^_RE1TAR)txGT7_kWW`$^lYK4J?goTEMiG`4bl7*Fpn1!Z=5r!6q8HOc>L54(zNrp;>P=-~8S%zAMVTNXgYKD"
        "b|k%pRvq=o>90*DBR3WybmAc!J}D2OVEL5M|&QHWHCS%_tbX^4P`f{2KSiinknpopS~sEDeF1&IcU5s4Iu7KtT^L5W0(Mu|y@P>E8BRf$@OV"
        "Tojkg^8AlnTe%|0Ez;N2#N}d6^bB=B8n)ADvCvlQHoTGR*Ha%f{KWWii(wrpo*f3sEVqJ1&|St7LXW_8IUEAL6Am}Nsv{LSddzfX^?7=g^-b"
        "ul#rH?nUJNB0g(ie29XJo5Rny;7?B#0A(14JCXp$TK#@g}P?1rQRFPGYR*_keVv%K$gpr1kl982>n3188q>-kPsgVVe5t0;=8ImQEM3P35Ns"
        ">^KQj%4YSdwOvX_AGKl#-T`sgePd1e6Ap5R?^^7?dWIK$J?9QIu4aRg_kgSd>|mV3c8$Vw7c+gp`Jql9ZH`m6Vv2p_HkV0F?!m2$c$z5S0;?"
        "6qOZ~7L^&5A(bVSDU~XfL6t<6MU_UCNtIBQQI%4aRFzegR+U(lS(RFqVU=W+WtC=?X_bMMg_Vevk(H8_l$Dj0mX(>6nw6lHqLrnUsFkXf0hR"
        "=o5SA5|8I~ZHCYC9dMV3gGNtRKTQkGSgR+d?oWtM1`f|i7qiI$3%l9rT~m6oKIrk1Ie1(+6?8JH!QL6}CEP?%DfRhU+oT9{;*WtfGSk(id4n"
        "V6-R1epez37HU?5}6g57?~QGAekYVB$+0eK$$|BMVUyMN|{laRGC$oR+(9uVwq)`W|?Z4ftiGvkeQO1m6@8Ep_!(c1)3F_C7MK<Mw&^QP?}Y"
        "mSejv)g_@C?l$w>AmYM*d0-y+>3ZNCBAfO_kD4;5!MW9ijRG?O%S)hQRf}n_?ilCLCprE3lsGzE#1)&L{5up^J7NHrT8lgs^Nug1pRiRj+TA"
        "^W~WTAzjkfD;HmZ6!U0-^|_3Zf9A8KNShD55H&MWRunR-##=Wukzhf})6`ilUXGprWFpsG_Q(8KfnoL8L^aP^46(Ris#?TBKp5Wu#`LXryVR"
        "g`@_h38fIF5~UTT7^NnqDWyWCMWs=tRHap=R;5{`Wu<DRfu)3{g{6k2iKUXIm8F=a1*Q?E7N#1eA*Lm!M5acjN~Th#Ri;*^Sf*g6Vy1?skfx"
        "QUmZq7ep{As!rltU>0;mY63aB8cBB&^+DyUJYRH#;{S*U=hf~bh7il~*Sps1p#sHm!_1*sIN8L1(uC8<HFP^nd^TB%{FW~phZkg1lb0ICA22"
        "&xLIAgUs&D5@%|QL0p`R;qxif~ttBimH{WpsJ#(sH&=}",
    ),
}
